"""Fosse et al. (2023): a direction is a class, and self-attention makes tokens alike."""
