"""Owns the first question to the hub: is this dataset there, open, reachable, and at which commit; a no comes quickly."""

from mezzotint.data.errors import InputError


def reachable_commit(name: str) -> str:
    """The newest commit of the hub dataset `name`.

    InputError in one sentence when it is gated, missing (or renamed) or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        HfApi().auth_check(name, repo_type="dataset")
        return HfApi().dataset_info(name).sha or "main"
    except GatedRepoError as error:
        raise InputError(
            f"the hub dataset {name} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"there is no hub dataset {name} (renamed, removed or private) and no file or folder of that name: "
            "check the name, or log in with `hf auth login`"
        ) from error
    except HFValidationError as error:
        raise InputError(f"{name} is neither a file or folder nor a possible hub name: check the path") from error
    except Exception as error:  # offline mode, name resolution, refused connection, proxy, server errors: many classes
        raise InputError(
            f"{name} is no file or folder here, and the hub could not be asked for it ({first_line(error)}): "
            "check the path or the network"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__
