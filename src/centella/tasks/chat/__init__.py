"""Messages to a prompt, by templates that anybody may have written."""
