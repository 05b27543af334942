"""Fosse et al. (2023): the direction of an utterance is its class, and self-attention makes its
tokens alike.
"""
