"""All that trains, measures and draws: data, training, runs, evaluation, comparison, plots, recipes."""
