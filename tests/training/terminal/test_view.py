"""Text that is safe to print on a terminal."""

from training.terminal.view import printable


def test_model_output_is_escaped_against_control_codes_and_markup() -> None:
    assert printable("a\tb\n\x1b[31mred\x07\r\x9b2J\u202e[bold]x[/bold]") == "a b↵�[31mred� �2J�[bold]x[/bold]"
    assert printable("日本 é") == "日本 é"
