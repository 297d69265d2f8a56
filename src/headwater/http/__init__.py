"""HTTP for a node and for the page of a lake: a bounded server, and what every request has to pass.

`serving` serves an application on sockets, `requests` has what applications share: answers, refusals, limits, the check
of the host, and the files of a built page. Neither knows what is served. `asking` is the other side: one request to a
server of others.
"""
