"""Authentication and authorization: users, their credentials and rights, and log-in checks."""
