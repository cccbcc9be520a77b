"""Content of messages: texts, and what replaces images and files. Knows no dialect."""
