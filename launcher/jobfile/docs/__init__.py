"""The schema, the reference and the template of job files, derived from the model."""
