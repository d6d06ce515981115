"""The pages of docs/ that are computed: `comfy-tp plan --files > docs/files.md`."""
