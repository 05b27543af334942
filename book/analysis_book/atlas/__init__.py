"""The atlas: what transformers returns, by type of model.

``probing.py`` finds it out of one model, with transformers alone; ``small.py`` makes a small model
of each type, ``building.py`` the table of them all; ``cards.py`` says it in words.
"""
