"""Out-of-memory messages: extracted from logs, read, explained, answered with advice."""
