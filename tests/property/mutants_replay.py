"""Planted faults of replay: each patches one rule; random traffic must notice every one."""

from dataclasses import replace

import msgspec

from core.hashing import PageHasher
from core.request import NO_FLOORS
from engine.cache.hit import ReuseRule
from engine.scheduler import holdings as holdings_module
from engine.scheduler.chains import Chains
from engine.scheduler.departures import Departures
from engine.scheduler.landing import Landing
from engine.scheduler.planner import Planner
from engine.stage import Stage, next_stage


def _change_init(patch, **changes):
    real = Planner._init

    def init(self, row):
        made = real(self, row)
        return msgspec.structs.replace(made, **{name: change(made) for name, change in changes.items()})

    patch.setattr(Planner, "_init", init)


def replayed_rows_write(patch):
    _change_init(patch, write_from=lambda init: 0)


def windows_have_no_floor(patch):
    _change_init(patch, encoder_floor=lambda init: max(0, init.encoder_floor - 1))


def the_keep_length_counts_outputs(patch):
    _change_init(patch, known_tokens=lambda init: init.known_tokens and len(init.token_ids) // 4)


def one_row_less_is_replayed(patch):
    def later(rule, hits, held, goal):
        stage = next_stage(rule, hits, held, goal)
        return replace(stage, start=stage.start + (stage.floor > 0))

    patch.setattr(holdings_module, "next_stage", later)


def pages_behind_a_hit_have_plain_hashes(patch):
    patch.setattr(PageHasher, "behind_hit", lambda self, previous, encoder_floor: previous)


def a_retraction_chooses_anew(patch):
    real = Departures.retract

    def retract(self, seq, now):
        real(self, seq, now)
        seq.floors = None

    patch.setattr(Departures, "retract", retract)


def a_resume_chooses_anew(patch):
    patch.setattr(Chains, "floors_of", lambda self, request: None)


def exact_requests_hit(patch):
    real = Chains.floors_of
    patch.setattr(
        Chains, "floors_of", lambda self, request: (f := real(self, request)) and (None if f == NO_FLOORS else f)
    )


def a_destination_forgets_the_sources_floors(patch):
    patch.setattr(Landing, "_take_floors", lambda self, seq, floors: None)


def a_lost_hit_is_computed_in_one_go(patch):
    def one_stage(rule, hits, held, goal):
        stage = next_stage(rule, hits, held, goal)
        return Stage(stage.start, goal, stage.floor, stage.write_from)

    patch.setattr(holdings_module, "next_stage", one_stage)


def a_longer_prefix_is_kept_than_the_source_went_on_behind(patch):
    patch.setattr(Landing, "_shorten_prefix", lambda self, wish: None)


def marks_do_not_name_their_floor(patch):
    patch.setattr(
        ReuseRule, "encoder_floor", lambda self, hit_tokens: max(0, hit_tokens - 2) if self.replays else hit_tokens
    )


MUTANTS = (
    replayed_rows_write,
    windows_have_no_floor,
    the_keep_length_counts_outputs,
    one_row_less_is_replayed,
    pages_behind_a_hit_have_plain_hashes,
    a_retraction_chooses_anew,
    a_resume_chooses_anew,
    exact_requests_hit,
    a_destination_forgets_the_sources_floors,
    a_lost_hit_is_computed_in_one_go,
    a_longer_prefix_is_kept_than_the_source_went_on_behind,
    marks_do_not_name_their_floor,
)
