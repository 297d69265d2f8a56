"""What is looked at before a landing begins, so that what can't work is said in one sentence and nothing is touched."""

from __future__ import annotations

import pyarrow.fs as fs

from headwater.client.bootstrap import bootstrap, look_at_bucket
from headwater.client.cluster_map import ClusterMap
from headwater.client.collection_names import CollectionNames
from headwater.errors import InvalidInput
from headwater.lake.delta_log import Selection
from headwater.lake.lake import OWN_FOLDER, Lake, landed_selection
from headwater.lake.layout import TableKind, open_filesystem
from headwater.spark.selection_watch import SeenCollection
from headwater.spark.source_options import SourceOptions, ValueForm


def names_in(directory: str) -> list[str]:
    """What a directory holds; nothing where there is none."""
    filesystem, path = open_filesystem(directory)
    try:
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except OSError as error:
        raise InvalidInput(
            f"{directory} can't be used: {error}", hint="Give a directory that can be written"
        ) from error
    return sorted(entry.base_name for entry in found)


_DELTA_LOG = "_delta_log"


# --- the bucket -------------------------------------------------------------------------------------------------------


def check_options(options: SourceOptions) -> None:
    """Options of the source that do not go with tables."""
    if options.value_form is not ValueForm.BINARY or options.read.no_value:
        raise InvalidInput(
            "tables hold the values of the bucket as they are", hint="Leave out the options value and noValue"
        )


def look_at_source(options: SourceOptions) -> ClusterMap:
    """Raises where the bucket is not there."""
    return bootstrap(options.settings).cluster_map


def selection_of(options: SourceOptions) -> Selection:
    return Selection.of(options.read.scopes, options.read.collections)


def check_selection(options: SourceOptions) -> None:
    """Raises where what is wanted of the bucket is not there."""
    scopes, collections = options.read.scopes, options.read.collections
    if scopes or collections:
        CollectionNames(look_at_bucket(options.settings).manifest).select(scopes=scopes, collections=collections)


# --- a directory with no tables ---------------------------------------------------------------------------------------


def check_empty(into: str) -> None:
    """A directory that holds something else is most likely a mistake."""
    others = [name for name in names_in(into) if name != OWN_FOLDER and not _is_unfinished(into, name)]
    if others:
        raise InvalidInput(
            f"{into} holds {others[0]!r} and no tables of a bucket", hint="Give an empty or a new directory"
        )


def _is_unfinished(into: str, name: str) -> bool:
    """Whether it is what is left of the making of the first table, which was cut off."""
    return name == TableKind.CHANGES and set(names_in(f"{into}/{name}")) <= {_DELTA_LOG}


# --- a directory with tables ------------------------------------------------------------------------------------------


def check_same_options(lake: Lake, options: SourceOptions) -> None:
    """What was left out once is never landed, so it has to be left out for ever."""
    where = lake.location.root
    if lake.facts.xattrs != options.read.xattrs:
        had = "with" if lake.facts.xattrs else "without"
        raise InvalidInput(f"the tables in {where} were made {had} extended attributes", hint="Use xattrs as before")
    before = landed_selection(lake)
    if before is not None and before != selection_of(options):
        raise InvalidInput(
            f"the tables in {where} were landed with {before}", hint="Ask for the same, or land into another directory"
        )


def seen_collections(lake: Lake, options: SourceOptions) -> list[SeenCollection]:
    """What was asked for was there when the tables were made. Whatever is not there any more has been dropped."""
    wanted = [SeenCollection(str(name)) for name in (*options.read.scopes, *options.read.collections)]
    return [*wanted, *(SeenCollection(name, id_) for id_, name in lake.state.collections.items())] if wanted else []
