// Generated from llmdebug_nb/notebook/desk_wire.py by `python labextension/wire_types.py`. Do not edit.

export type Kind = 'run' | 'report';
export type State = 'complete' | 'recording' | 'incomplete';

/**
 * A run on disk, or a report.
 *
 * ``place``: its path in the file browser, "" if Jupyter does not serve it. ``problem``: why it
 * can't be opened, "" if its marker is sound. ``model``: the class of the recorded model, ""
 * if it is not known. ``verdict``: of the last comparison of this run with the golden run
 * ``against``; both are "" before one was made.
 */
export interface RunRow {
  kind: Kind;
  name: string;
  path: string;
  place: string;
  created: number;
  bytes: number;
  records: number | null;
  steps: number | null;
  state: State;
  problem: string;
  model: string;
  verdict: string;
  against: string;
}

/** A folder of runs or of reports, newest first. */
export interface RunsFolder {
  kind: Kind;
  folder: string;
  runs: RunRow[];
}

/** The runs in ``folders`` and in ``name`` below each of them, and the reports in these. */
export interface RunsRequest {
  op: 'runs';
  folders: string[];
  name: string;
}

export interface Runs {
  folders: RunsFolder[];
}

export interface DeleteRequest {
  op: 'delete';
  path: string;
}

export interface Deleted {
  path: string;
}

/** A run or a report's file (``mine`` is ""), or two runs to compare. */
export interface OpenRequest {
  op: 'open';
  golden: string;
  mine: string;
}

/**
 * The explorer's code and its first traits; for a file its ``page`` instead.
 *
 * ``scripts``: whether scripts run in the page; only our own do.
 */
export interface Opened {
  title: string;
  code: string;
  traits: Record<string, unknown>;
  page: string;
  scripts: boolean;
}

/** What each op asks and answers. */
export interface Ops {
  runs: { request: RunsRequest; answer: Runs };
  delete: { request: DeleteRequest; answer: Deleted };
  open: { request: OpenRequest; answer: Opened };
}
