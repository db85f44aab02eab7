-- Reads on in a frozen rollout, if it still is the one that was frozen.
-- 1  incarnation
-- 2  version
-- 3  step to read from
-- 4  bytes to read at once
-- Reply    OK, step to read on from, rows (see collect_rows) | CHANGED (marked meanwhile) | RETIRED
-- Repeat   safe
local state, err = load_state()
if err then return err end
if not state or state.incarnation ~= arg(1) or state.status ~= 'frozen' then
  return reply('RETIRED', state)
end
if tonumber(state.version) ~= tonumber(arg(2)) then return reply('CHANGED', state) end
local rows = {}
local next_seq = collect_rows(state, tonumber(arg(3)), tonumber(arg(4)), rows)
return reply('OK', state, next_seq, rows)
