"""What is asked for, from fields of a JSON object to a neutral request. Knows no engine, no tokens.

What every dialect reads alike is read here, and checked: nobody looks at user input after that.
"""
