"""What each route answers, as plain data."""
