"""The ledger's tables as SQL text: migrations are appended, never edited.

Every table is STRICT and append-only; the triggers are generated here from the table list so that none is forgotten.
"""

from __future__ import annotations

APPLICATION_ID = 0x4B334C45  # "K3LE"

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE run (
        run TEXT PRIMARY KEY NOT NULL CHECK (length(run) > 0),
        nonce TEXT NOT NULL UNIQUE CHECK (length(nonce) > 0),
        created_at REAL NOT NULL CHECK (created_at > 0),
        snapshot TEXT NOT NULL CHECK (length(snapshot) = 64),
        commit_id TEXT NOT NULL,
        dirty INTEGER NOT NULL CHECK (dirty IN (0, 1)),
        sabotage TEXT NOT NULL,
        recorder INTEGER NOT NULL CHECK (recorder > 0),
        cluster TEXT NOT NULL,
        tree INTEGER NOT NULL REFERENCES blob (id),
        record TEXT NOT NULL CHECK (json_valid(record)),
        digest TEXT NOT NULL UNIQUE CHECK (length(digest) = 64)
    ) STRICT;
    CREATE TABLE blob (
        id INTEGER PRIMARY KEY,
        digest TEXT NOT NULL UNIQUE CHECK (length(digest) = 64),
        body TEXT NOT NULL CHECK (json_valid(body))
    ) STRICT;
    CREATE TABLE test (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE CHECK (length(name) > 0)
    ) STRICT;
    CREATE TABLE job (
        run TEXT NOT NULL REFERENCES run (run),
        job TEXT NOT NULL CHECK (length(job) > 0),
        generation INTEGER NOT NULL CHECK (generation >= 0),
        scheduler TEXT NOT NULL CHECK (scheduler IN ('local', 'slurm')),
        collected_at REAL NOT NULL CHECK (collected_at >= 0),
        record TEXT NOT NULL CHECK (json_valid(record)),
        digest TEXT NOT NULL CHECK (length(digest) = 64),
        PRIMARY KEY (run, job, generation)
    ) STRICT;
    CREATE TABLE attempt (
        run TEXT NOT NULL,
        job TEXT NOT NULL,
        generation INTEGER NOT NULL,
        number INTEGER NOT NULL CHECK (number >= 0),
        state TEXT NOT NULL CHECK (state IN (
            'pending', 'running', 'suspended', 'completed', 'failed', 'node_fail', 'preempted', 'timeout',
            'out_of_memory', 'cancelled', 'requeued', 'launch_failed', 'rejected', 'unknown')),
        machine_fault INTEGER NOT NULL CHECK (machine_fault IN (0, 1)),
        scheduler_id TEXT NOT NULL,
        nodes TEXT NOT NULL,
        exit_code INTEGER,
        submitted_at REAL,
        started_at REAL,
        ended_at REAL,
        PRIMARY KEY (run, job, generation, number),
        FOREIGN KEY (run, job, generation) REFERENCES job (run, job, generation),
        CHECK (ended_at IS NULL OR started_at IS NULL OR ended_at >= started_at)
    ) STRICT;
    CREATE TABLE stream (
        id INTEGER PRIMARY KEY,
        run TEXT NOT NULL REFERENCES run (run),
        job TEXT NOT NULL,
        attempt INTEGER NOT NULL CHECK (attempt >= 0),
        rank INTEGER NOT NULL CHECK (rank >= 0),
        generation INTEGER NOT NULL CHECK (generation >= 0),
        size_bytes INTEGER NOT NULL CHECK (size_bytes >= 0),
        digest TEXT NOT NULL CHECK (length(digest) = 64),
        head TEXT NOT NULL CHECK (json_valid(head)),
        rows_digest TEXT NOT NULL CHECK (length(rows_digest) = 64),
        UNIQUE (run, job, attempt, rank, size_bytes)
    ) STRICT;
    CREATE TABLE record (
        stream INTEGER NOT NULL REFERENCES stream (id),
        line INTEGER NOT NULL CHECK (line > 0),
        test INTEGER NOT NULL REFERENCES test (id),
        outcome TEXT NOT NULL CHECK (
            outcome IN ('passed', 'failed', 'error', 'skipped', 'xfailed', 'xpassed', 'lost')),
        duration_s REAL NOT NULL CHECK (duration_s >= 0 AND duration_s < 1e9),
        time REAL NOT NULL CHECK (time > 0 AND time < 1e11),
        begun REAL,
        message TEXT NOT NULL,
        closure INTEGER NOT NULL REFERENCES blob (id),
        detail INTEGER NOT NULL REFERENCES blob (id),
        PRIMARY KEY (stream, line)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE measure (
        stream INTEGER NOT NULL,
        line INTEGER NOT NULL,
        number INTEGER NOT NULL CHECK (number >= 0),
        name TEXT NOT NULL CHECK (length(name) > 0),
        unit TEXT NOT NULL,
        direction TEXT NOT NULL CHECK (direction IN ('lower', 'higher')),
        shape TEXT NOT NULL,
        dtype TEXT NOT NULL,
        samples TEXT NOT NULL CHECK (json_valid(samples)),
        context TEXT NOT NULL CHECK (json_valid(context)),
        PRIMARY KEY (stream, line, number),
        FOREIGN KEY (stream, line) REFERENCES record (stream, line)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX measure_name ON measure (name);
    CREATE TABLE evidence (
        digest TEXT PRIMARY KEY NOT NULL CHECK (length(digest) = 64),
        run TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    CREATE TABLE fact (
        source TEXT NOT NULL CHECK (length(source) IN (0, 64)),
        run TEXT NOT NULL,
        generation INTEGER NOT NULL CHECK (generation >= 0),
        claim TEXT NOT NULL,
        topology TEXT NOT NULL,
        outcome TEXT NOT NULL CHECK (outcome IN ('passed', 'failed', 'unproven')),
        created_at REAL NOT NULL,
        claim_digest TEXT NOT NULL,
        closure INTEGER NOT NULL REFERENCES blob (id),
        toolchain TEXT NOT NULL,
        witness TEXT NOT NULL CHECK (witness IN ('', 'T0', 'T1')),
        sabotage TEXT NOT NULL,
        body TEXT NOT NULL CHECK (json_valid(body)),
        PRIMARY KEY (source, run, generation, claim, topology, outcome)
    ) STRICT;
    CREATE INDEX fact_cell ON fact (claim, topology, sabotage, outcome, claim_digest, closure, toolchain, created_at);
    CREATE TABLE entry (
        seq INTEGER PRIMARY KEY,
        run TEXT NOT NULL,
        source TEXT NOT NULL CHECK (length(source) IN (0, 64)),
        generation INTEGER NOT NULL,
        ingested_at REAL NOT NULL CHECK (ingested_at > 0),
        faults TEXT NOT NULL CHECK (json_valid(faults)),
        content TEXT NOT NULL CHECK (length(content) = 64),
        link TEXT NOT NULL UNIQUE CHECK (length(link) = 64)
    ) STRICT;
    """,
)

# table -> the sets of columns that identify a row: a second row with the same values is refused by trigger, so that
# INSERT OR REPLACE cannot rewrite history even on a connection without recursive_triggers.
IDENTITIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "run": (("run",), ("nonce",), ("digest",)),
    "blob": (("id",), ("digest",)),
    "test": (("id",), ("name",)),
    "job": (("run", "job", "generation"),),
    "attempt": (("run", "job", "generation", "number"),),
    "stream": (("id",), ("run", "job", "attempt", "rank", "size_bytes")),
    "record": (("stream", "line"),),
    "measure": (("stream", "line", "number"),),
    "evidence": (("digest",),),
    "fact": (("source", "run", "generation", "claim", "topology", "outcome"),),
    "entry": (("seq",), ("link",)),
}


def triggers() -> dict[str, str]:
    """Trigger name -> the exact SQL that must be in the file."""
    found: dict[str, str] = {}
    for table, identities in IDENTITIES.items():
        for verb in ("UPDATE", "DELETE"):
            name = f"{table}_no_{verb.lower()}"
            found[name] = (
                f"CREATE TRIGGER {name} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, 'ledger is append-only: {verb} on {table} refused'); END"
            )
        same = " OR ".join(
            f"EXISTS (SELECT 1 FROM {table} WHERE {' AND '.join(f'{c} = NEW.{c}' for c in columns)})"
            for columns in identities
        )
        found[f"{table}_no_replace"] = (
            f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} WHEN {same} "
            f"BEGIN SELECT RAISE(ABORT, 'ledger is append-only: a row of {table} with this identity exists'); END"
        )
    return found
