-- Reads on in a frozen rollout, if it still is the one that was frozen.
-- 1  incarnation
-- 2  snapshot id
-- 3  version
-- 4  step to read from
-- 5  bytes to read at once
-- Reply    OK, step to read on from, rows (see collect_rows) |
--          CHANGED (marked meanwhile, or the server forgot the freeze) | RETIRED
-- Repeat   safe
local state, err = load_state()
if err then return err end
if not state or state.incarnation ~= arg(1) or state.status == 'retired' then
  return reply('RETIRED', state)
end
if state.snapshot ~= arg(2) or tonumber(state.version) ~= tonumber(arg(3)) then
  return reply('CHANGED', state)
end
local rows = {}
local next_seq = collect_rows(state, tonumber(arg(4)), tonumber(arg(5)), rows)
return reply('OK', state, next_seq, rows)
