"""The same training, written for each library as its user would write it.

The programs repeat each other on purpose: their lines are what is counted, so none of them calls another's.
"""
