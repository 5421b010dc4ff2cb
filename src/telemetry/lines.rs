//! The parts of log lines that others may have written: a run id, what a handler raised, what a downstream said.
//!
//! Characters that are not to be seen, or that turn the text around, would let one line look like two, or like another
//! one. They are written by their numbers instead: in text lines where a field is formatted, in JSON as its own escapes.

use std::fmt::{self, Debug, Write};
use std::io;

use tracing::field::Field;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;

/// Writes a field of a text line: the message as it reads, others as `name=value`.
pub fn field(writer: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> fmt::Result {
    match field.name() {
        "message" => write!(Plain(writer), "{value:?}"),
        // Of records that came by way of the crate log: repeated in the line's own parts.
        name if name.starts_with("log.") => Ok(()),
        name if writer.has_ansi_escapes() => {
            write!(writer, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?;
            write!(Plain(writer), "{value:?}")
        }
        name => write!(Plain(writer), "{name}={value:?}"),
    }
}

/// Whether a character is not what it seems: controls and line ends; what joins, hides or turns the text around it; tags.
fn misleads(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Text in which nothing misleads: `\u{202e}`, `\n`.
struct Plain<'a, W>(&'a mut W);

impl<W: Write> Write for Plain<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.split_inclusive(misleads) {
            match part.chars().next_back().filter(|last| misleads(*last)) {
                Some(last) => {
                    self.0.write_str(&part[..part.len() - last.len_utf8()])?;
                    write!(self.0, "{}", last.escape_default())?;
                }
                None => self.0.write_str(part)?,
            }
        }
        Ok(())
    }
}

/// Stderr for JSON lines. A JSON writer escapes controls only; the others occur in its strings and nowhere else, so they
/// can be escaped in the finished line.
#[derive(Debug, Clone, Copy)]
pub struct JsonLines<W>(pub W);

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for JsonLines<W> {
    type Writer = JsonLine<W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        JsonLine(self.0.make_writer())
    }
}

pub struct JsonLine<W>(W);

impl<W: io::Write> io::Write for JsonLine<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Whole lines come here, and they are text.
        match std::str::from_utf8(line) {
            Ok(text) if !text.is_ascii() => self.0.write_all(escaped_in_json(text).as_bytes())?,
            Ok(_) | Err(_) => self.0.write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn escaped_in_json(line: &str) -> String {
    let mut escaped = String::with_capacity(line.len() + 16);
    for character in line.chars() {
        // The line's end is its own; the controls within are escaped already.
        if character.is_ascii() || !misleads(character) {
            escaped.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            escaped.push_str(&format!("\\u{unit:04x}"));
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use tracing_subscriber::field::MakeExt;
    use tracing_subscriber::fmt::format::debug_fn;

    const HOSTILE: &str = "a\u{202e}b\u{1b}[31mc\nd\u{2028}e\u{85}f\u{200b}g\u{e0041}h é😀";

    const HIDDEN: [char; 7] = [
        '\u{202e}',
        '\u{1b}',
        '\n',
        '\u{2028}',
        '\u{85}',
        '\u{200b}',
        '\u{e0041}',
    ];

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Kept {
        fn log(&self, subscriber: impl tracing::Subscriber + Send + Sync) -> String {
            tracing::subscriber::with_default(subscriber, || {
                let span = tracing::info_span!("request", run = %HOSTILE).entered();
                tracing::info!(shown = %HOSTILE, text = HOSTILE, "said {HOSTILE}");
                drop(span);
            });
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    #[test]
    fn nothing_in_a_text_line_pretends_to_be_something_else() {
        let kept = Kept::default();
        let writer = kept.clone();
        let lines = tracing_subscriber::fmt()
            .with_ansi(false)
            .fmt_fields(debug_fn(field).delimited(" "))
            .with_writer(move || writer.clone());
        let line = kept.log(lines.finish());
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        assert!(!line.trim_end_matches('\n').contains(HIDDEN), "{line:?}");
        let escaped = r"a\u{202e}b\u{1b}[31mc\nd\u{2028}e\u{85}f\u{200b}g\u{e0041}h é😀";
        for part in [
            format!("said {escaped} "),
            format!("shown={escaped} "),
            format!("text=\"{escaped}\"\n"),
            format!("request{{run={escaped}}}"),
        ] {
            assert!(line.contains(&part), "{part}\n{line}");
        }
    }

    #[test]
    fn a_json_line_says_the_same_in_plain_characters() {
        let kept = Kept::default();
        let writer = kept.clone();
        let lines = tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_writer(JsonLines(move || writer.clone()));
        let line = kept.log(lines.finish());
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        assert!(!line.trim_end_matches('\n').contains(HIDDEN), "{line:?}");
        let event: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(event["shown"], HOSTILE);
        assert_eq!(event["message"], format!("said {HOSTILE}"));
        assert_eq!(event["span"]["run"], HOSTILE);
    }
}
