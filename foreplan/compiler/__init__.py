"""From a model and options to a step that is planned: what `foreplan.compile` runs, in a row."""
