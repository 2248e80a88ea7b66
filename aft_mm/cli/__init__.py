"""What the command line tools share.

`errors.py` imports nothing of the package, so that hooks and samples end in its sentences, too.
"""
