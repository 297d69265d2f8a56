"""What tests of all kinds share: nodes, oracles, fakes and checkers, one of each."""
