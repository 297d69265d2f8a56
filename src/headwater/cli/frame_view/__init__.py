"""How a captured frame is shown: as annotated text the way the specification draws packets, or as a line of JSON.

`view_dcp_frame` and `view_upr_frame` make a `FrameView` of a frame; `annotate` and `json_line` print one.
"""

from headwater.cli.frame_view.frames import view_dcp_frame, view_upr_frame
from headwater.cli.frame_view.parts import FrameView
from headwater.cli.frame_view.printing import ERROR_STYLE, annotate, json_line

__all__ = [
    "ERROR_STYLE",
    "FrameView",
    "annotate",
    "json_line",
    "view_dcp_frame",
    "view_upr_frame",
]
