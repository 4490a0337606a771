"""Models by their name on a hub: their files are downloaded into the cache that the Hugging Face tools share.

    errors      the errors, each with what to do
    listing     the files of a revision, as the hub lists them
    selection   the files that a family needs: configuration first, then weights, never code
    download    one file: resumed, verified, moved into place
    fetching    a name becomes a folder
    progress    a line for the terminal
    memory      the bytes of a checkpoint's weights, by the headers of their files

Only this package asks a hub. `dalsegno.config.resolve` calls it before a configuration is checked, in one
process: the launcher gives its roles the folder.
"""
