"""For processes of SGLang's environment, of which a server is three: starting, they seldom search imports for garbage.

That takes a third off their start, and there is one for every server that a test starts.
"""

import gc

gc.set_threshold(100_000, 20, 20)
