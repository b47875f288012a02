"""Grammars of calls as a Python list of function calls, the values written as JSON (which the parser reads too)."""

from collections.abc import Mapping

from gateway.text.grammar import Literal, Parts, quoted
from gateway.text.grammar_calls import Demand, Function, parameters


class PythonCallGrammar:
    """``[f(a=1), g(b="x")]``, as the whole of an answer."""

    begin: Literal = ()
    bare = "["

    def __init__(self, added: Mapping[str, int]) -> None:
        """`added`: ids of added tokens, of which none is needed."""

    def write(self, demand: Demand, parts: Parts) -> str:
        names = [_function(number, function, parts) for number, function in enumerate(demand.functions)]
        parts.rules.append(f"call: {' | '.join(names)}")
        return f'"[" call{"" if demand.is_single else """ (", " call)*"""} "]"'


def _function(number: int, function: Function, parts: Parts) -> str:
    name = f"f{number}"
    head = quoted(f"{function.name}(")
    if function.schema is None:
        any_value = parts.schema({})
        parts.rules += [f"k{number}: /[A-Za-z_][A-Za-z0-9_]*/ {quoted('=')} {any_value}"]
        parts.rules += [f'{name}: {head} (k{number} (", " k{number})*)? ")"']
        return name
    # first_i: nothing is written yet, rest_i: something is, and a comma must come before parameter i.
    declared = list(parameters(function))
    for index, (parameter, schema, is_required) in enumerate(declared):
        parts.rules.append(f"p{number}_{index}: {quoted(f'{parameter}=')} {parts.schema(schema)}")
        here, after = f"p{number}_{index}", f"{number}_{index + 1}"
        parts.rules.append(f"first{number}_{index}: {here} rest{after}{'' if is_required else f' | first{after}'}")
        parts.rules.append(f'rest{number}_{index}: ", " {here} rest{after}{"" if is_required else f" | rest{after}"}')
    parts.rules += [f'{kind}{number}_{len(declared)}: ""' for kind in (("first", "rest") if declared else ("first",))]
    parts.rules.append(f'{name}: {head} first{number}_0 ")"')
    return name
