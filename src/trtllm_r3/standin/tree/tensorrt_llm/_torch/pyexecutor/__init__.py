"""The loop: schedules requests, runs the model, samples, answers."""
