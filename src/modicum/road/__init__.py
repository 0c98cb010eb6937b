"""The road from a folder of text to a chat model: stages, plan, report, starter.

A stage's work is done by the rooms below; here stands what it depends on and where its results lie. Nothing is imported
here, so that the starter and the plan's words do not wait for torch.
"""
