"""The parts of the documentation that are generated from the code.

A page has places for them, between `<!-- made: NAME -->` and `<!-- /made -->`; the rest of it is written by hand.
`python -m handbook` fills all places, and a test checks that they match the code.
"""
