"""Chat templates by name: one Jinja file each, with `{% generation %}` marks around the assistant's text.

load_template("llama3")             # text of a built-in template
load_template("mine/chat.jinja")    # text of a file
"""
