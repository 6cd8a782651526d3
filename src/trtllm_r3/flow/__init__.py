"""The road of a row, from the router to the request. Knows torch and numpy, no engine and no trainer."""
