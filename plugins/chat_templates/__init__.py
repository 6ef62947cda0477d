"""Chat templates that replace the tokenizer's, and variables that are set in a template."""

PROVIDES = {
    "chat template": {
        "text": "templates:template_text",
        "checked": "templates:read_template",
        "arguments": "templates:set_template_arguments",
    }
}
