"""What `headwater tail` is made of: formats of changes, the line that shows the lag, signals, and where to go on."""
