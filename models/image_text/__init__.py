"""Image-text encoders, CLIP and SigLIP: embeddings of texts and images in one space.

graph        the walk, the options, the claim
processing   texts to token ids, images to pixels
nodes        the node with both towers
"""
