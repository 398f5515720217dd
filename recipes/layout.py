"""Names of the files in the folder of a run.

OUT/recipe.yaml          full recipe
OUT/run.json             command, versions, machine, counts, and the recipe again, to detect changes of recipe.yaml
OUT/measurements.json    measurements so far
OUT/checkpoints/         complete checkpoints to resume from
OUT/logs/                TensorBoard logs by stage, if requested
OUT/table.md, OUT/perplexity.png, OUT/report.html
OUT/model/               final model or adapter, with tokenizer and card; it appears last, and marks the run as finished
"""

RECIPE, RUN, MEASUREMENTS = "recipe.yaml", "run.json", "measurements.json"
CHECKPOINTS, LOGS, MODEL = "checkpoints", "logs", "model"
