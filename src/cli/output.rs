//! What goes to the terminal: tables for people, one JSON document for scripts, reasons on stderr.
//!
//! Text from the service may hold anything a caller or a handler wrote. Nothing of it acts on a terminal: control
//! characters, escape sequences and characters that hide or reorder text are shown as escapes.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};

use serde::Serialize;
use serde_json::value::RawValue;

use super::client::answer::Answer;
use super::exit::{Exit, Failure};

/// Rows under a header, in columns as wide as their widest cell.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn with_header(names: &[&str]) -> Self {
        let mut table = Self::default();
        table.row(names.iter().copied());
        table
    }

    /// Adds a row; its cells are made inert.
    pub fn row<Cell: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows
            .push(cells.into_iter().map(|cell| inert(cell.as_ref())).collect());
    }

    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| length(cell))
                .max()
        };
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                let padding = width - length(cell);
                // Writing to a string does not fail.
                let _ = write!(line, "{cell}{:padding$}  ", "");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// The text with everything in it that could act on a terminal shown as an escape, line breaks included.
pub fn inert(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if acts(character) {
            shown.extend(character.escape_unicode())
        } else {
            shown.push(character)
        }
    }
    shown
}

/// The same, but for text of several lines: line breaks and tabs stay.
pub fn inert_lines(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if acts(character) && character != '\n' && character != '\t' {
            shown.extend(character.escape_unicode());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Valid JSON with the same values and the same digits, and no character that acts on a terminal: within strings those
/// are written as `\u….`; outside of strings JSON has only line breaks and tabs.
fn inert_json(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut units = [0u16; 2];
    for character in text.chars() {
        if acts(character) && !matches!(character, '\n' | '\r' | '\t') {
            for unit in character.encode_utf16(&mut units) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Controls, and the invisible characters that reorder, join or hide what stands around them.
fn acts(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{061c}'
                | '\u{00ad}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// Writes to stdout. A reader that has gone away (`| head`) wants no more, which is no error.
pub fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_ref()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::other(format!("cannot write to stdout: {error}")))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes bytes exactly as they are; on a terminal, what could act on it is shown as escapes.
pub fn print_exact(bytes: &[u8]) -> Result<(), Failure> {
    if io::stdout().is_terminal() {
        return print(inert_lines(&String::from_utf8_lossy(bytes)) + "\n");
    }
    print(bytes)
}

/// Writes the one JSON document of `--json`: the body as it came, digit for digit.
pub fn print_json(body: &[u8]) -> Result<(), Failure> {
    let text = std::str::from_utf8(body).unwrap_or("null").trim();
    print(inert_json(text) + "\n")
}

/// Writes a document of our own.
pub fn print_document(document: &impl Serialize) -> Result<(), Failure> {
    let text =
        serde_json::to_string(document).map_err(|error| Failure::other(format!("cannot write JSON: {error}")))?;
    print_json(text.as_bytes())
}

/// Says why on stderr.
pub fn say(text: &str) {
    eprintln!("opledger: {}", inert_lines(text));
}

/// Shows lines on stderr, beside what a script reads.
pub fn show_aside(text: &str) {
    eprint!("{}", inert_lines(text));
}

/// Writes an answer's status and headers to stderr, a line each.
pub fn say_headers(answer: &Answer) {
    eprintln!("{}", answer.status.as_u16());
    for (name, value) in &answer.headers {
        eprintln!("{name}: {}", inert(&String::from_utf8_lossy(value.as_bytes())));
    }
}

/// Shows an answer that is not what was asked for: the reason on stderr and, for scripts, the problem on stdout.
pub fn refused(answer: &Answer, json: bool) -> Result<Exit, Failure> {
    let Some(problem) = answer.problem() else {
        return Err(answer.foreign());
    };
    say(&problem.reason());
    if json {
        print_json(&answer.body)?;
    }
    Ok(Exit::of_problem(answer.status.as_u16(), Some(&problem.code)))
}

/// Ends a command that has no answer to show.
pub fn failed(failure: &Failure, json: bool) -> Exit {
    #[derive(Serialize)]
    struct Problem<'a> {
        r#type: &'static str,
        title: &'static str,
        code: &'static str,
        detail: &'a str,
        retryable: bool,
    }
    say(&failure.detail);
    if json {
        let problem = Problem {
            r#type: "about:blank",
            title: "The command ended without an answer of the service",
            code: failure.code,
            detail: &failure.detail,
            retryable: failure.retryable,
        };
        // It has been said on stderr already.
        let _ = print_document(&problem);
    }
    failure.exit
}

/// Shows a JSON value in one line: digits as they came.
pub fn one_line(value: Option<&RawValue>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| value.get().to_owned())
}

/// How many there are, in words.
pub fn counted(count: i64, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}[2J\u{1b}]0;owned\u{7}\r\nb\u{9b}31m\u{202e}evil\u{200b}\u{7f}";

    #[test]
    fn nothing_in_a_table_acts_on_a_terminal() {
        let mut table = Table::with_header(&["ID", "KIND"]);
        table.row([HOSTILE, "<img onerror=alert(1)>"]);
        let text = table.render();
        assert!(
            !text.chars().any(|character| acts(character) && character != '\n'),
            "{text:?}"
        );
        assert_eq!(text.lines().count(), 2, "one line for each row");
        assert!(text.contains(r"a\u{1b}[2J") && text.contains("<img onerror=alert(1)>"));
    }

    #[test]
    fn columns_line_up_and_lines_end_without_blanks() {
        let mut table = Table::with_header(&["STATE", "ID"]);
        table.row(["succeeded", "é"]);
        table.row(["failed", "b"]);
        assert_eq!(table.render(), "STATE      ID\nsucceeded  é\nfailed     b\n");
    }

    #[test]
    fn escaped_json_is_the_same_json() {
        let text = "{\"text\": \"a\u{9b}b\u{202e}c\u{7f}\u{e0041}\",\n \"n\": [12233344445555567, 0.1000, 1E2]}";
        let shown = inert_json(text);
        assert!(
            !shown.chars().any(|character| acts(character) && character != '\n'),
            "{shown:?}"
        );
        assert!(shown.contains("[12233344445555567, 0.1000, 1E2]"));
        let (before, after): (serde_json::Value, serde_json::Value) = (
            serde_json::from_str(text).unwrap(),
            serde_json::from_str(&shown).unwrap(),
        );
        assert_eq!(before, after);
    }
}
