"""Text that is safe to print on a terminal."""

from training.terminal.view import printable


def test_what_a_model_writes_moves_no_cursor_and_is_no_markup() -> None:
    assert printable("a\tb\n\x1b[31mred\x07\r\x9b2J\u202e[bold]x[/bold]") == "a b↵�[31mred� �2J�[bold]x[/bold]"
    assert printable("日本 é") == "日本 é"
