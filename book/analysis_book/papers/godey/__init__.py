"""Godey, de la Clergerie and Sagot (EACL 2024): anisotropy is inherent to self-attention."""
