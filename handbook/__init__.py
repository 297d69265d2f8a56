"""The parts of the documentation that are made from the code.

A page has places for them, between `<!-- made: NAME -->` and `<!-- /made -->`; the rest of it is written by hand.
`python -m handbook` fills all of them, and a test holds that they are filled as the code would have it.
"""
