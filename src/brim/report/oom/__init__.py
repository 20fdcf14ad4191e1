"""Out-of-memory messages: found in logs, read, explained, answered with advice."""
