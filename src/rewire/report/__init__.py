"""``rewire report``: runs and sweeps as one page that needs nothing but a browser.

``runs`` reads folders, ``groups`` puts the seeds of a setting together, ``views`` says how each of the
paper's experiments is looked at, ``sections`` makes tables and plots of it, and ``page`` the HTML.
"""
