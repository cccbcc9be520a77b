"""What commands do in a terminal: a chat, tables, the machine's check-up. Knows no options."""
