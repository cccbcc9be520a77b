"""What commands do in a terminal: a chat, tables, a check of the machine."""
