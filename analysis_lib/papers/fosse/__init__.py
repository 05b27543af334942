"""Fosse, Nguyen, Sébillot and Gravier (TALN 2023): the direction of the cone is the class."""
