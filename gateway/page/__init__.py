"""The page for people at `/`: a chat with the model, with files and sound, and each request's way.

Its files are in `static/`, without a build step: modules of our own, and in `static/vendor/` two libraries as
their publishers ship them. The page uses the public routes only.
"""
