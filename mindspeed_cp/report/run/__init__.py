"""What a traced run looks like, and the prediction of the same steps."""
