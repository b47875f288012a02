"""Metrics of the engine that every worker exports under the same names: pages by state, rows, tokens, steps."""

from core.exported import Exported

ENGINE_METRICS = (
    *(
        Exported(f"engine_pages_{state}", f"tandem_pages_{state}", f"Pages in state {state.upper()}.")
        for state in ("free", "private", "loading", "landing", "unproven", "tree", "fenced")
    ),
    Exported("engine_pages_evictable", "tandem_pages_evictable", "Cached pages that nobody uses."),
    Exported("engine_rows_used", "tandem_rows_used", "Rows that a sequence holds."),
    Exported("engine_waiting", "tandem_sequences_waiting", "Sequences queued for a row and pages."),
    Exported("engine_sequences", "tandem_sequences_live", "Sequences of any state."),
    Exported("engine_steps", "tandem_engine_steps_total", "Steps computed."),
    Exported("engine_prefill_tokens", "tandem_prefill_tokens_total", "Prompt tokens computed."),
    Exported("engine_decode_tokens", "tandem_decode_tokens_total", "Output tokens computed."),
    Exported("engine_cached_tokens", "tandem_cached_tokens_total", "Prompt tokens found in the prefix cache."),
    Exported(
        "engine_replayed_tokens",
        "tandem_replayed_tokens_total",
        "Tokens before the end of a cached prefix that were computed again for their windows.",
    ),
    Exported("engine_recomputed_tokens", "tandem_recomputed_tokens_total", "Tokens computed a second time."),
    Exported("engine_retractions", "tandem_retractions_total", "Sequences that lost their pages for a while."),
    Exported("engine_drafts_verified", "tandem_drafts_verified_total", "Draft tokens that the model verified."),
    Exported("engine_drafts_accepted", "tandem_drafts_accepted_total", "Draft tokens that became output."),
    Exported("engine_grammar_requests", "tandem_grammar_requests_total", "Requests with a grammar."),
    Exported("engine_grammar_compiled", "tandem_grammar_compiled_total", "Grammars compiled."),
    Exported("engine_grammar_refused", "tandem_grammar_refused_total", "Grammars that could not be compiled."),
    Exported(
        "engine_grammar_compile_s", "tandem_grammar_compile_seconds_total", "Seconds spent on compiling grammars."
    ),
    Exported("engine_grammar_kept", "tandem_grammar_kept", "Compiled grammars in memory."),
    Exported("engine_grammar_waiting", "tandem_grammar_waiting", "Grammars that wait to be compiled."),
    Exported("engine_grammar_masks", "tandem_grammar_masks_total", "Masks made."),
    Exported(
        "engine_grammar_mask_wait_s",
        "tandem_grammar_mask_wait_seconds_total",
        "Seconds that steps waited for masks beyond the forward pass.",
    ),
    Exported(
        "engine_grammar_failed",
        "tandem_grammar_failed_total",
        "Requests that ended because their grammar grew too complex.",
    ),
)
