"""The experiments of each paper, beyond measuring; the claims, and the verdict of a model on each.

To add a figure with a claim, write the claim into ``data/claims/PAPER.yml`` (its fields are those
of ``claims.Claim``), and into a notebook of ``book/`` a cell that draws and a cell with the number
that decides, as a function of the tables: ``claims.verdicts`` gives it an interval and a verdict,
of one model or of each of several, and ``verdicts_over_seeds`` and ``judged`` take numbers whose
intervals come from elsewhere. The page's test in ``tests/papers`` plants what the cell should find;
``tests/book/test_notebooks.py`` says what a cell may be.
"""
