//! A terminal with somebody in front of it: commands that ask are shown to it, and get what is typed.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A command on a terminal; what it writes to stdout goes nowhere.
pub struct Terminal {
    child: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
}

impl Terminal {
    pub fn run(mut command: Command) -> Self {
        let pair = nix::pty::openpty(None, None).unwrap();
        let child = command
            .stdin(Stdio::from(pair.slave.try_clone().unwrap()))
            .stdout(Stdio::null())
            .stderr(Stdio::from(pair.slave))
            .spawn()
            .unwrap();
        // Its ends of the terminal are the child's alone now.
        drop(command);
        let screen = Arc::<Mutex<String>>::default();
        let (mut output, shown) = (File::from(pair.master.try_clone().unwrap()), screen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The end of the last process on it is an error on Linux.
            while let Ok(count) = output.read(&mut bytes) {
                if count == 0 {
                    break;
                }
                shown
                    .lock()
                    .unwrap()
                    .push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Self {
            child,
            keyboard: File::from(pair.master),
            screen,
        }
    }

    /// What it shows, once this is among it.
    pub async fn shows(&self, text: &str) -> String {
        let give_up_at = Instant::now() + Duration::from_secs(20);
        loop {
            let shown = self.screen.lock().unwrap().clone();
            if shown.contains(text) {
                return shown;
            }
            assert!(Instant::now() < give_up_at, "it never shows {text:?}:\n{shown}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Types a line, and waits for the command to end.
    pub async fn types(mut self, line: &str) -> (Option<i32>, String) {
        self.keyboard.write_all(format!("{line}\n").as_bytes()).unwrap();
        let give_up_at = Instant::now() + Duration::from_secs(20);
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code();
            }
            assert!(Instant::now() < give_up_at, "the command does not end");
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let shown = self.shows("").await;
        (code, shown)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
