"""Kit of the robot policies Pi0 and Pi0.5: images, a robot's state and an instruction in, actions out.

    graph.py          the graph and the plan                                      imported by the conductor
    settings.py       a checkpoint's `config.json`, in the layout of lerobot, openpi or transformers
    normalization.py  the statistics of a checkpoint: robot units <-> the model's numbers
    observations.py   what robots call their cameras and joints
    prompts.py        instruction and state -> text
    images.py         a camera's image in the model's size
    processing.py     the CPU nodes: observation -> pixels, token ids, state; and actions -> the robot's units
    tensor_names.py   the names of tensors in the three layouts
    networks.py       the configs of the networks, by the shapes of their tensors
    tower.py          the stateless node `vit_encoder`
    expert.py         the action expert: a tower of the KV node, over the node's own cells
    flow.py           the program `actions`: the prefix once, then the steps of the flow
    nodes.py          `nodes.load` of a family, made of its expert

A family gives its expert, its prompt, and its claim.
"""
