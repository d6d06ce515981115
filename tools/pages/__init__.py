"""The pages of docs/ that are computed: `python -m comfy_tp.tools.pages.files > docs/files.md`."""
