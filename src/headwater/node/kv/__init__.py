"""The key-value front end: what each command does, sans-IO."""
