"""What an experiment of each paper needs beyond measuring; the claims, and the verdict of a model on each.

To add a figure with a claim, write the claim into ``data/claims/PAPER.yml``, and into a notebook of ``book/`` the cell
that draws and the cell that computes the number that decides, which ``claims.verdicts_of_estimates`` judges.
"""
